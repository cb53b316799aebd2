"""What each paper claims above all, and which reproduction asks whether it is so."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Headline:
    """One claim of a paper.

    Attributes:
      claim: in words.
      where: section, table or figure of the paper.
      figures: reproduction -> expression that its claims match.
      instead: where else it is checked, or why it is not run.
    """

    claim: str
    where: str
    figures: dict[str, str] = dataclasses.field(default_factory=dict)
    instead: str = ""


FULL = "not run: the archived run is quick; `dpfl reproduce` without --quick has these arms"
NO_DATA = "not run: {} not at hand"
ONE_EPSILON = "not run: each model is trained at one epsilon"
PROVEN = "not run: {} is proven in the library's own words, and it accounts so"
CONVEX = "not run: theory, for convex losses"
TESTS = "tests: the default tests hold it against other implementations (`tests/accounting/`)"

HEADLINES: dict[str, list[Headline]] = {
    "Charles et al. 2024: ELS or ULS": [
        Headline(
            "a mixture of Gaussians accounts for ELS, tightly, and a Bernoulli one for ULS",
            "section 2, Theorems 1 and 2",
            instead=PROVEN.format("each ([els](../theory/els.md), [uls](../theory/uls.md))"),
        ),
        Headline(
            "at small sigma it is far below black-box group privacy, which diverges",
            "section 2, Figure 1",
            {"userlevel/figure-1": "below the black box|near-linearly|diverges"},
        ),
        Headline(
            "ELS's noise hardly depends on its group size, if all users have K examples (here at "
            "epsilon 1)",
            "Figure 2(a)",
            {"userlevel/figure-2": r"2\(a\)"},
        ),
        Headline(
            "for equal gradients ELS has less noise; for orthogonal ones often ULS, at small "
            "epsilon or large compute",
            "Figure 2(b); Appendix B",
            {"userlevel/figure-2": "gradients|cross"},
        ),
        Headline(
            "the same at other cohort sizes",
            "Appendix B, Figure 9",
            instead="not run: one cohort size, 16",
        ),
        Headline(
            "conjecture: ELS needs at most K times ULS's noise (holds at delta 1e-6, fails at "
            "0.09)",
            "Conjecture 1",
            {"userlevel/lemma-1": "Conjecture"},
        ),
        Headline(
            "in one-sided Renyi divergences of integer orders it does, in one step",
            "Lemma 1",
            {"userlevel/lemma-1": "^Lemma"},
        ),
        Headline(
            "in mean estimation ULS with G = 1 is level with ELS or better; larger groups help "
            "when a user's examples vary, epsilon is small or compute large, and ULS is then well "
            "ahead",
            "section 4, Figure 3",
            {"userlevel/figure-3": "ULS with G = 1 is|groups improve|regimes"},
        ),
        Headline(
            "there G = K is the best group size for ELS (here: of K and 1)",
            "section 4",
            {"userlevel/figure-3": "no better at G"},
        ),
        Headline(
            "the median user size is a good group size for ELS (here: of 8 and 64, at one budget)",
            "Figure 4",
            {"userlevel/figure-4": "median"},
        ),
        Headline(
            "similar group sizes are good at every epsilon",
            "Appendix E, Figures 11, 12",
            instead=ONE_EPSILON,
        ),
        Headline(
            "ULS: more users up to a limit, then more examples of each (here at epsilon 4 and 2)",
            "Figures 5, 13",
            {
                "userlevel/figure-5": "best group|better than large",
                "userlevel/budgets": "examples of a user|at the largest",
            },
        ),
        Headline(
            "Estimate-and-Double, with the 1/M that the paper leaves out, is near the best cell",
            "section 6; Appendix F.1, Figures 14, 15",
            {"userlevel/figure-5": "^budget .*Estimate"},
        ),
        Headline(
            "it is as good as the oracle for most budgets",
            "Appendix F.1, Figures 14, 15",
            {"userlevel/figure-5": "oracle"},
        ),
        Headline(
            "ULS is at least as good as ELS in all settings (Stack Overflow; here at epsilon 4, "
            "and ELS at the median size, which was not its best in figure 4)",
            "section 6, Figures 6, 16",
            {"userlevel/figure-6": "at least as good.*median"},
        ),
        Headline(
            "the same beside ELS at another group size (here 8)",
            "section 6, Figures 6, 16",
            {"userlevel/figure-6": "at least as good(?!.*median)"},
        ),
        Headline(
            "ULS gains more from compute (here at epsilon 4 and 2; ELS at the median size)",
            "section 6, Figures 6, 16",
            {"userlevel/figure-6": "gains more", "userlevel/budgets": "gains more"},
        ),
        Headline(
            "ULS's lead is largest at small epsilon and large compute",
            "abstract; section 6",
            instead=ONE_EPSILON,
        ),
        Headline(
            "on CC-News ULS is ahead in many settings, mostly at large compute or small epsilon",
            "section 6, Figures 7, 17",
            instead=NO_DATA.format("CC-News' text by site"),
        ),
        Headline(
            "pre-training without near-duplicates of the private text (C4--)",
            "section 5, Appendix D",
            instead="not run: the corpora are not at hand; `dpfl data build "
            "--remove-near-duplicates-of` has such a filter",
        ),
        Headline(
            "more users help ELS more, more compute helps ULS more (here: 1 and 10 times the "
            "users, not 100)",
            "Figure 8",
            {"userlevel/figure-8": "."},
        ),
        Headline("sizes of users", "Figure 10", instead=NO_DATA.format("the two data sets")),
        Headline(
            "both beat the pre-trained model in all settings (here at epsilon 4 only)",
            "section 6",
            {"userlevel/figure-4": "pre-trained", "userlevel/figure-6": "pre-trained"},
        ),
        Headline(
            "personalisation gains both about the same",
            "section 6; Figure 18",
            {"userlevel/figure-18": "."},
        ),
        Headline(
            "ULS scales linearly in devices",
            "section 5",
            instead="not run: it takes several accelerators ([what fits where](pods.md))",
        ),
    ],
    "Marathe et al.: subjects over silos (A: Subject Granular DP; B: Hierarchical Averaging)": [
        Headline(
            "subjects in a batch, and their largest groups",
            "A: Figure 2, section 5.2; B: Figures 1, 2, 4, Appendix E.2",
            {"subject/batch-statistics": "."},
        ),
        Headline(
            "A: HiGradAvgDP needs about ten times the noise, and ten times more on Shakespeare",
            "A: section 5.1",
            {"subject/audit": "order of magnitude"},
        ),
        Headline(
            "each algorithm gives a subject (UserLDP: a user) epsilon 4 in one silo",
            "A: sections 3.1 to 3.3; B: section 3, Appendix A",
            {
                "subject/audit": "has epsilon 4 in one silo$",
                "subject/empirical-audit": "noise by the batch",
            },
        ),
        Headline(
            "what several silos tell of a subject adds up (horizontal composition)",
            "A: Theorem 3.12; B: Theorem 4.1",
            instead=PROVEN.format("[silos](../theory/README.md#silos)"),
        ),
        Headline(
            "R/sqrt(s) rounds pay for s silos",
            "A: Theorem 3.13; B: Theorem 4.2",
            {"subject/audit": "sqrt"},
        ),
        Headline(
            "noise for s times the steps pays for s silos",
            "A: section 3.5; B: section 4",
            {"subject/audit": "s times the steps"},
        ),
        Headline(
            "subjects confined to one silo pay nothing for silos (parallel composition)",
            "A: section 3.5; B: section 4",
            instead=PROVEN.format("[silos](../theory/README.md#silos)"),
        ),
        Headline(
            "a subject moves HiGradAvgDP's sum by C at most",
            "A: Lemma 3.6; B: Lemma 3.1",
            instead=PROVEN.format("[hi_grad_avg](../theory/hi_grad_avg.md), for Poisson batches,"),
        ),
        Headline(
            "local differential privacy of users protects subjects",
            "A: section 3.3; B: Theorem A.1",
            instead=PROVEN.format("[user_ldp](../theory/user_ldp.md), with a sensitivity of 2C,"),
        ),
        Headline(
            "LocalItemDP is below FedAvg, LocalGroupDP below it, and UserLDP below that",
            "A: Figure 1; B: Figures 1, 2",
            {"subject/curves": "^both: (Local|User)", "subject/shakespeare": "^both:"},
        ),
        Headline(
            "B: HiGradAvgDP is near LocalItemDP and above LocalGroupDP",
            "B: Figures 1, 2",
            {
                "subject/curves": "^text B.*(competitive|above)",
                "subject/shakespeare": "^text B",
            },
        ),
        Headline(
            "B: with fewer rounds HiGradAvgDP ends below LocalItemDP",
            "B: section 5",
            {"subject/curves": "after its fewer rounds"},
        ),
        Headline(
            "A: HiGradAvgDP is below LocalGroupDP",
            "A: Figure 1",
            {"subject/curves": "^text A:", "subject/shakespeare": "^text A: HiGradAvgDP is below"},
        ),
        Headline(
            "A: HiGradAvgDP is the worst of all on Shakespeare",
            "A: Figure 1",
            {"subject/shakespeare": "worst of all"},
        ),
        Headline(
            "skew hurts LocalGroupDP, little B's HiGradAvgDP, and LocalItemDP not",
            "B: Appendix E.2, Figure 3",
            {"subject/skew": "."},
        ),
        Headline(
            "A: its HiGradAvgDP is resilient to skew up to 8",
            "A: Figure 3",
            instead="not run: with Adam it hardly learns at the sizes that a processor trains",
        ),
        Headline("few subjects hurt both", "B: Appendix E.3", {"subject/few-subjects": "."}),
        Headline(
            "more noise is worse than fewer rounds",
            "A: section 5; B: Appendix E",
            {"subject/curves": "rounds is worse"},
        ),
        Headline(
            "the noise term of the excess risk grows with the square of the group size "
            "(LocalGroupDP), or of a subject's records (A's HiGradAvgDP)",
            "A: section 4; B: Theorem C.6",
            instead=CONVEX,
        ),
        Headline(
            "B: of HiGradAvgDP it has the noise term of items, and grows linearly elsewhere",
            "B: section 1, Theorem C.9",
            instead=CONVEX,
        ),
        Headline(
            "the loss of R rounds grows by sqrt(R)",
            "A: section 3.4; B: section 3.3",
            instead="not run: rounds are accounted as the steps that they are",
        ),
        Headline(
            "accuracies on FEMNIST and Shakespeare at the papers' size",
            "A: Figure 1; B: Figure 1, section 5",
            instead=NO_DATA.format("FEMNIST by its 3,500 writers is")
            + ", and Shakespeare's two-layer LSTM takes an accelerator",
        ),
    ],
    "Liu et al. 2024: an epsilon for every record": [
        Headline("bounds of one and of two stages", "section 5", instead=TESTS),
        Headline(
            "epsilon over the rate is close to an exponential",
            "Figures 5, 6",
            {"rpdp/curve": "R\\^2"},
        ),
        Headline(
            "at some of the fitted rates records stop early",
            "ours; section 6.3 names it as a risk",
            {"rpdp/curve": "stop early"},
        ),
        Headline(
            "early stops and unused budgets have statistically insignificant effects",
            "section 6.3",
            {"rpdp/budgets": "table 3"},
        ),
        Headline(
            "lambda T rho bounds the divergence of what the server sees (Type I), for lambda < 1; "
            "at lambda = 1 it does",
            "sections 5, 5.1, Theorem 3",
            {"rpdp/curve": "Type I"},
        ),
        Headline(
            "a bound for clients and third parties (Type II)",
            "section 5, Theorem 3, Lemma 2",
            instead=TESTS,
        ),
        Headline(
            "a larger sigma raises all sampling rates",
            "section 6.3, Figure 6",
            {"rpdp/curve": "larger sigma"},
        ),
        Headline(
            "an improper sigma degrades the model",
            "section 6.3",
            instead="not run: no training varies sigma alone",
        ),
        Headline(
            "sampling silos lowers epsilon",
            "sections 5, 6.1",
            {"rpdp/curve": "sampling silos|figure 5 is below"},
        ),
        Headline(
            "personal rates beat Dropout and Minimum",
            "Figure 8",
            {
                "rpdp/heart": "^(?!.*certif).*curve fit.*ahead",
                "rpdp/mnist": "^(?!.*certif).*curve fit.*ahead",
                "rpdp/budgets": "curve_fit is ahead",
            },
        ),
        Headline(
            "its accuracies on the hospitals",
            "Figure 8",
            {"rpdp/published": "^figure 8, hospitals"},
        ),
        Headline(
            "its accuracies on MNIST, IID and non-IID",
            "Figure 8",
            instead="not run: half an hour of two cores a seed (`dpfl reproduce rpdp/published`)",
        ),
        Headline(
            "the same on CIFAR-10 and SNLI",
            "Figure 8",
            instead=NO_DATA.format("CIFAR-10 and SNLI are") + ", and they take an accelerator",
        ),
        Headline(
            "non-IID silos cost every method accuracy", "Figure 8", {"rpdp/mnist": "non-IID silos"}
        ),
        Headline(
            "bisection and the fitted curve tie (tried with other budgets, in 4 silos)",
            "Table 3",
            {"rpdp/budgets": "table 3"},
        ),
        Headline(
            "the fitted rates beat a Renyi filter, whose records are filtered early, in accuracy",
            "section 7.1.1, Table 2",
            instead="not run: with rates by bisection, and where the filter stops few records "
            "([rpdp/centralised](#rpdpcentralised))",
        ),
        Headline(
            "they are two or three times as fast in a step",
            "section 7.1.1, Table 2",
            instead="not run: its filter is timed nowhere here",
        ),
        Headline(
            "the same on MNIST, pooled",
            "Table 2, Figure 7",
            instead="not run: the filter has full batches of 60,000 images",
        ),
        Headline(
            "budgets by class beat one budget for all, over all classes",
            "appendix A, Table 4's last column",
            {"rpdp/budgets": "table 4"},
        ),
        Headline(
            "no gain for rare strict patients",
            "appendix A, Figure 9",
            instead="not run: its noise and learning rate are not given",
        ),
        Headline(
            "budgets by class gain in classes 3, 5, 6 and 7, and not in 0, 1 and 2",
            "appendix A, Table 4",
            instead="not run: only the overall accuracy is, on smaller digits",
        ),
        Headline(
            "bisection takes minutes where the curve takes seconds, for many budgets",
            "Table 3",
            instead="not run: none of its three groups of budgets, on 1,000 images",
        ),
    ],
    "Lowy and Razaviyayn 2023: nobody trusted": [
        Headline(
            "the theorems' noise keeps the stated epsilon",
            "Theorems D.1, E.1",
            {"isrl/closed-forms": "^Theorem"},
        ),
        Headline(
            "an attack finds no more than Theorem D.1's noise lets it",
            "Definition 2, Theorem D.1",
            {"isrl/audit": "^paper_closed_form"},
        ),
        Headline(
            "the experiments' noise keeps it: MNIST, gradients at most L / 2 (with the script's R)",
            "appendix I.1",
            {"isrl/closed-forms": r"^the experiments.*MNIST, K = \d+,"},
        ),
        Headline(
            "the same: medical cost, clipped at L (by appendix I's K; with the scripts' K only "
            "epsilon 3 fails)",
            "appendix I.2",
            {"isrl/closed-forms": r"^the experiments.*cost, N = \d+, K = \d+,"},
        ),
        Headline(
            "the same: obesity levels, with the script's R",
            "authors' code",
            {"isrl/closed-forms": r"^the experiments.*levels, K = \d+,"},
        ),
        Headline(
            "MNIST: MB-SGD beats local SGD, private or not",
            "Figures 4, 7",
            {"isrl/mnist": "^(?!sound).*local SGD"},
        ),
        Headline(
            "MNIST: the same for M = 12, for M = 18 but at epsilon 3, and at epsilon 1.5, 6 and 18",
            "Figures 4, 7",
            instead=FULL,
        ),
        Headline(
            "MNIST: upsilon_*^2 is about 0.17 at most", "appendix I.1", {"isrl/mnist": "upsilon"}
        ),
        Headline(
            "medical cost: MB-SGD beats local SGD in most setups (here each is a verdict)",
            "Figures 5, 8, 9",
            {"isrl/insurance": "MB-SGD is ahead of local SGD, each record clipped"},
        ),
        Headline(
            "medical cost: for N = 3 near epsilon 3 local SGD is ahead",
            "appendix I.2, Figure 9",
            {"isrl/insurance": "local SGD is ahead of MB-SGD, each record clipped"},
        ),
        Headline(
            "medical cost: ahead of the mean for most epsilons (tried at 1, 2 and 3)",
            "appendix I.2",
            {"isrl/insurance": "each record clipped, ahead of predicting the mean$"},
        ),
        Headline(
            "medical cost: it tends to be ahead of the mean by 30 to 40 % near epsilon 1",
            "appendix I.2",
            {"isrl/insurance": "each record clipped, ahead of predicting the mean by"},
        ),
        Headline(
            "medical cost: from epsilon 2 on in line with local SGD without privacy (at most 0.05 "
            "above, which is ours)",
            "section 6, Figure 5",
            {"isrl/insurance": "in line with non-private local SGD, each record clipped"},
        ),
        Headline(
            "medical cost: these five, by the authors' script",
            "authors' code",
            {
                "isrl/insurance": "ahead of (local|MB-SGD).*as published$|as published, ahead|"
                "in line with non-private local SGD, as published"
            },
        ),
        Headline(
            "medical cost: privacy costs little near epsilon 3",
            "appendix I.2",
            instead="no verdict: no size is given for little",
        ),
        Headline(
            "medical cost: other N and M",
            "Figures 5, 8, 9",
            instead="not run: two federations of the six panels are",
        ),
        Headline(
            "obesity levels: by 10 to 30 % (read as points) at every epsilon",
            "Figure 6",
            {"isrl/obesity": "paper's noise from each silo"},
        ),
        Headline(
            "obesity levels: the same, as the authors' script adds noise",
            "authors' code",
            {"isrl/obesity": "as coded"},
        ),
        Headline(
            "rates of the empirical risk (slopes, on chosen instances)",
            "section 2.1, second terms of Theorem 2.1",
            {"isrl/rates": "."},
        ),
        Headline(
            "rates of the population risk: of silos alike, that differ, and shuffled",
            "Theorems 2.1 (first terms), 3.1, 5.1, 5.2",
            instead="not run: `dpfl_jax/federation/isrl/theory.py` has their bounds",
        ),
        Headline(
            "rates of the empirical risk, accelerated",
            "Theorem 4.1",
            instead="not run: `dpfl_jax/federation/isrl/theory.py` has its bound",
        ),
        Headline(
            "uniform stability of Noisy MB-SGD, new for strongly convex losses",
            "section 2.1, Lemma D.2",
            instead="not run: theory",
        ),
        Headline(
            "lower risk than earlier ISRL-DP methods",
            "section 1, appendix A",
            instead="not run: none of them is here",
        ),
        Headline("what trust is worth", "Figure 3", {"isrl/trust-ladder": "."}),
        Headline(
            "privacy for free when d is at most n epsilon², up to constants and logarithms (found "
            "where n epsilon² is 12,800 times d or more)",
            "sections 1 and 2",
            {"isrl/privacy-for-free": "privacy|ratio falls"},
        ),
        Headline(
            "user-level protection by epsilon/n",
            "appendix D.3.5",
            {"isrl/privacy-for-free": r"epsilon/n"},
        ),
        Headline(
            "the optimal rate of user-level protection without trust",
            "appendix D.3.5",
            instead="not run: only that the recipe is valid",
        ),
        Headline(
            "acceleration saves rounds, beside plain gradient steps",
            "ours",
            {"isrl/acceleration": "."},
        ),
        Headline(
            "it saves rounds beside Girgis et al. 2021",
            "section 4, Remark F.1",
            instead="not run: their algorithm is not here",
        ),
        Headline(
            "what silos that differ do when all, or a quarter, of them answer",
            "Theorem 3.1, Lemma E.3",
            {"isrl/heterogeneity": "."},
        ),
        Headline(
            "of unequal budgets the average counts, if the variance of 1/M_r is small",
            "Theorem H.1, Remark H.1",
            {"isrl/unbalanced": "."},
        ),
        Headline("losses that are not smooth", "Lemma D.7", {"isrl/smoothing": "."}),
        Headline(
            "the shuffle model's vector protocol, corrected",
            "Algorithms 4 to 6",
            {"isrl/vector-protocol": "."},
        ),
        Headline(
            "with a shuffler, Gaussian noise reaches the central rates, too",
            "Theorem 5.1",
            {"isrl/shuffled": "^shuffle|constant C"},
        ),
        Headline(
            "shuffling amplifies fully interactive ISRL-DP algorithms",
            "Theorems D.4, D.5",
            instead="not run: `accounting.closed_forms.shuffled_epsilon` has its bound",
        ),
        Headline(
            "no sequentially interactive or compositional algorithm has lower risk, up to "
            "logarithms",
            "Theorem 2.2, Theorem F.3",
            instead="not run: a statement about all algorithms of a class, which no run can show",
        ),
    ],
    "Choquette-Choo et al. 2023: noise that later steps take back": [
        Headline(
            "BandMF is ahead of independent noise, with users for examples",
            "section 5",
            {"correlated/language-model": "BandMF", "correlated/digits": "BandMF"},
        ),
        Headline(
            "BLT and random allocation, beside it: as their noise in prefix sums foretells",
            "ours",
            {
                "correlated/language-model": "BLT|allocation",
                "correlated/digits": "BLT|allocation",
            },
        ),
        Headline(
            "at the paper's size (Stack Overflow, CIFAR-10)",
            "section 5",
            instead=NO_DATA.format("both are"),
        ),
    ],
}
