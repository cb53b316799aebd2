"""What the papers say, in their own words: which sentence each claim of a reproduction is about.

A claim of the source "paper" has one sentence: the first whose pattern matches its words. It is
empty where a figure says it without words, or the authors' code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Figure -> (pattern of claims, words of the paper, where they stand).
QUOTES: dict[str, Sequence[tuple[str, str, str]]] = {
    # ---- Charles et al. 2024 ----
    "userlevel/figure-1": [
        (
            "below the black box",
            "significantly outperform generic example-to-user reductions",
            "section 1, Figure 1",
        ),
        ("near-linearly", "Our accountant gives near-linear scaling", "section 2, Figure 1"),
        ("diverges", "the black-box accountant diverged for", "section 2, Figure 1"),
    ],
    "userlevel/figure-2": [
        ("2\\(a\\)", "has almost no effect on the variance", "section 3, Figure 2(a)"),
        (
            "equal gradients",
            "the variance of ELS is lower in nearly all settings",
            "Appendix B, Figure 9",
        ),
        ("orthogonal|cross", "we see that ULS has smaller variance when", "section 3, Figure 2(b)"),
    ],
    "userlevel/lemma-1": [
        ("Conjecture 1, for all", "For all", "section 3, Conjecture 1"),
        (
            "Conjecture 1 at delta",
            "This conjecture is empirically supported by Figures 2 and 9",
            "section 3",
        ),
        ("Lemma 1", "For integers", "section 3, Lemma 1"),
    ],
    "userlevel/figure-3": [
        ("G = 1 is", "is comparable to if not better than ELS across all settings", "section 4"),
        ("no better at G", "it uniformly gives the best performance for ELS", "section 4"),
        ("larger groups", "when one of the following occurs", "section 4, Figure 3"),
        ("regimes", "In these regimes, ULS improves significantly on ELS", "section 4"),
    ],
    "userlevel/figure-4": [
        (
            "median",
            "This coincides almost exactly with the median dataset size across all users",
            "section 6, Figure 4",
        ),
        (
            "pre-trained",
            "significant wins over simply using the pre-trained checkpoint in all settings",
            "section 6",
        ),
    ],
    "userlevel/figure-5": [
        (
            "near the best",
            "this strategy is close to optimal in our empirical study",
            "section 6; Appendix F, Algorithm 3",
        ),
        (
            "oracle",
            "performs as well as the oracle strategy for most compute budgets",
            "Appendix F.1, Figures 14 and 15",
        ),
        (
            "at least 10",
            "is always at least an order of magnitude smaller than",
            "section 6, Figure 5",
        ),
        ("federated practice", "which is far from optimal in our setting", "section 6, Figure 5"),
    ],
    "userlevel/figure-6": [
        (
            "at least as good",
            "ULS performs at least as well as ELS in all settings",
            "section 6, Figure 6 (Stack Overflow)",
        ),
        ("gains more", "ULS improves more with increased compute budgets", "section 6"),
        (
            "pre-trained",
            "significant wins over simply using the pre-trained checkpoint in all settings",
            "section 6",
        ),
    ],
    "userlevel/figure-8": [
        (
            "more users",
            "the loss of ELS decreases more as the number of users increases",
            "section 6, Figure 8",
        ),
        (
            "compute",
            "the loss of ULS decreases more as compute budget increases",
            "section 6, Figure 8",
        ),
    ],
    "userlevel/figure-18": [
        (
            "lowers|about the same",
            "both algorithms seem to benefit comparably from personalization",
            "section 6",
        ),
        ("order", "does not change the general trade-offs discussed above", "section 6"),
    ],
    "userlevel/budgets": [
        (
            "worth more|largest budget",
            "increase M up to a limit (in this case 512) before increasing",
            "section 6, Figure 5",
        ),
        ("gains more", "ULS improves more with increased compute budgets", "section 6"),
    ],
    # ---- Marathe et al., texts A and B ----
    "subject/audit": [
        (
            "text A, HiGradAvgDP has",
            "we must consider sampling probability of individual subjects instead of data items",
            "A: section 3.2",
        ),
        ("text B, HiGradAvgDP has", "locally enforces subject level", "B: Theorem 3.2"),
        (
            "UserLDP, text B",
            "of the computed parameter gradient is bounded by",
            "B: Lemma A.2, Theorem A.3",
        ),
        ("UserLDP, text A", "enforces user level", "A: Theorem 3.11"),
        (
            "R/sqrt",
            "globally enforces the same subject level",
            "A: Theorem 3.13; B: Theorem 4.2",
        ),
        (
            "s times",
            "scale the number of training minibatches",
            "A: section 3.5; B: section 4",
        ),
        ("another order", "by another order of magnitude", "A: section 5.1"),
        (
            "order of magnitude",
            "noise scale amplification by approximately an order of magnitude",
            "A: section 5.1",
        ),
    ],
    "subject/empirical-audit": [
        ("LocalGroupDP", "enforces subject level privacy locally at each user", "A: section 3.1"),
    ],
    "subject/batch-statistics": [
        ("475", "per mini-batch of 512 for FEMNIST averages to 475", "B: section 5"),
        ("310", "goes from an average of 475 to 310 respectively", "B: Appendix E.2"),
        ("86", "per mini-batch of 100 for Shakespeare averages to 86", "B: section 5"),
        (
            "dominant",
            "the group size for a mini-batch tends to be dominated by 3 on both",
            "A: section 5.1; B: section 5",
        ),
        (
            "skew 2|skew 16|grows",
            "the average group size per mini-batch ranges from 3",
            "A: section 5.2; B: Appendix E.2",
        ),
        ("350", "the increase in subject group size (to an average of 4)", "B: Appendix E.3"),
    ],
    "subject/curves": [
        ("LocalItemDP is below", "results in performance degradation of 8%", "B: section 5"),
        ("LocalGroupDP is below", "by 15% on FEMNIST, and 18% on Shakespeare", "B: section 5"),
        ("UserLDP", "LocalGroupDP performs significantly better than UserLDP", "B: section 5"),
        ("competitive", "performs competitively with", "B: section 5, Figure 1"),
        (
            "after its fewer rounds",
            "the training round restriction does result in degradation of the final model",
            "B: section 5",
        ),
        ("above LocalGroupDP", "leads to much better model utility", "B: section 6"),
        ("below LocalGroupDP", "performs worse than", "A: section 5.1, Figure 1"),
        (
            "more noise",
            "this approach consistently yielded worse model utility than our first approach",
            "A: section 5; B: Appendix E",
        ),
    ],
    "subject/shakespeare": [
        ("LocalItemDP is below", "and 22% for Shakespeare", "B: section 5, Figure 1(e)"),
        ("^both: LocalGroupDP is below", "and 18% on Shakespeare", "B: section 5"),
        (
            "UserLDP is below",
            "LocalGroupDP performs significantly better than UserLDP",
            "B: section 5, Figure 1(e)",
        ),
        ("above LocalGroupDP", "leads to much better model utility", "B: section 6"),
        ("is below LocalGroupDP", "performs worse than", "A: section 5.1, Figure 1(c)"),
        ("worst of all", "model’s utility is the worst", "A: section 5.1, Figure 1(c)"),
    ],
    "subject/skew": [
        (
            "not significantly",
            "clearly do not significantly affect FedAvg, LocalItemDP, and User-Local-SGD",
            "A: section 5.2; B: Appendix E.2",
        ),
        (
            "loses more",
            "degrades substantially as the unevenness of data distribution increases",
            "B: Appendix E.2, Figure 3",
        ),
        (
            "5 %",
            "test accuracy drops by just about 5% from",
            "B: Appendix E.2, Figure 3",
        ),
    ],
    "subject/few-subjects": [
        (
            "LocalGroupDP drops",
            "We note a substantial drop in the performance of",
            "B: Appendix E.3",
        ),
        (
            "HiGradAvgDP drops",
            "There is also a noticable drop in performance of",
            "B: Appendix E.3",
        ),
    ],
    # ---- Liu et al. 2024 ----
    "rpdp/curve": [
        ("caption's", "the best-fit curve achieves more than 99.9%", "section 6.3, Figure 6"),
        ("figure 5, lambda", "value exceeding 99%", "section 6.1, Figure 5"),
        (
            "figure 6, sigma",
            "the best-fit curve achieves more than 99.9%",
            "section 6.3, Figure 6",
        ),
        (
            "larger sigma",
            "resulting in universally increased sampling probabilities for everyone",
            "section 6.3, Figure 6",
        ),
        ("authors' sigma", "", "the authors' scripts"),
        (
            "Type I",
            "",
            'section 5.1, "Privacy Objectives": D(A_FL) = lambda T D(A_in); Theorem 3',
        ),
        ("figure 2", "are consistently greater than those in Figure 5", "section 6.1, footnote 7"),
    ],
    "rpdp/heart": [
        (
            ".",
            "demonstrate the superiority of our rPDP-FL method over both Minimum and Dropout",
            "section 7.2, Figure 8",
        ),
    ],
    "rpdp/mnist": [
        (
            "ahead",
            "demonstrate the superiority of our rPDP-FL method over both Minimum and Dropout",
            "section 7.2, Figure 8",
        ),
        (
            "lower accuracy",
            "we observed a consistent reduction in test accuracy in the non-IID case",
            "section 7.2, Figure 8",
        ),
    ],
    "rpdp/budgets": [
        (
            "ahead",
            "demonstrate the superiority of our rPDP-FL method over both Minimum and Dropout",
            "section 7.2, Figure 8",
        ),
        ("table 3", "while achieving a comparable model performance", "section 7.1.2, Table 3"),
        (
            "table 4",
            "",
            "appendix A, Table 4's last column (92.55, against 89.08 and 90.69)",
        ),
    ],
    "rpdp/published": [
        (
            "figure 8",
            "Evaluation of rPDP-FL (labeled as Ours) across diverse privacy preference",
            "Figure 8 and the authors' result files",
        ),
        ("authors' files", "", "the authors' result files"),
    ],
    # ---- Lowy and Razaviyayn 2023 ----
    "isrl/closed-forms": [
        ("Theorem D.1", "Then Algorithm 2 is", "Theorem D.1"),
        ("Theorem E.1", "One-Pass Accelerated Noisy MB-SGD", "Theorem E.1"),
        (
            "the experiments",
            "which provides ISRL-DP by Theorem 1 of (Abadi et al., 2016) if",
            "appendices I.1 to I.3",
        ),
    ],
    "isrl/mnist": [
        ("non-private local", "outperforms (non-private) Local SGD for", "section 6, Figure 4"),
        ("ahead of local SGD", "and outperforms ISRL-DP Local SGD", "section 6, Figures 4 and 7"),
        ("is below that", "", "section 6, Figure 4"),
        (
            "upsilon",
            "for this problem (corresponding to each silo having disjoint local data sets",
            "appendix I.1",
        ),
    ],
    "isrl/insurance": [
        (
            "local SGD is ahead",
            "we observe that ISRL-DP Local SGD outperforms ISRL-DP MB-SGD",
            "appendix I.2, Figure 9",
        ),
        (
            "N=10.*in line with",
            "is in line with (non-private) Local SGD",
            "section 6, Figure 5",
        ),
        (
            "N=3.*in line with",
            "We observe qualitatively similar behavior",
            "appendix I.2, of Figures 8 and 9",
        ),
        (
            "by 30 to 40",
            "tends to outperform the naiive predictor by",
            "appendix I.2, of epsilon near 1",
        ),
        (
            "MB-SGD is ahead",
            "continues to outperform ISRL-DP Local SGD in most tested setups/privacy levels",
            "section 6; appendix I.2",
        ),
        (
            "predicting the mean",
            "the ISRL-DP FL algorithms still outperform this predictor for most values",
            "appendix I.2",
        ),
    ],
    "isrl/obesity": [
        (
            ".",
            "our algorithm significantly outperforms ISRL-DP Local SGD by",
            "section 6, Figure 6",
        ),
    ],
    "isrl/rates": [
        (
            ".",
            "are bounds on the empirical risk of the algorithm",
            "section 2.1, of the second terms of Theorem 2.1",
        ),
    ],
    "isrl/trust-ladder": [
        (
            ".",
            "The ISRL-DP rates sit between the local DP and central DP rates",
            "section 1, Figure 3",
        ),
    ],
    "isrl/shuffled": [
        ("constant C", "there is a constant", "appendix G.1, Theorem G.1"),
        (".", "match the optimal central DP rates", "section 5, Theorem 5.1"),
    ],
    "isrl/privacy-for-free": [
        ("epsilon/n", "ISRL-DP Implies User-Level DP for small", "appendix C.2"),
        (".", "the ISRL-DP rates nearly match the optimal non-private rates if", "section 1"),
    ],
    "isrl/acceleration": [
        (".", "", "section 4, Theorem 4.1"),
    ],
    "isrl/heterogeneity": [
        ("all silos", "even when silo data is arbitrarily heterogeneous", "section 3, Theorem 3.1"),
        ("quarter", "case is harder when data is highly heterogeneous", "section 3, end"),
        (".", "stochastic gradients", "Lemma E.3"),
    ],
    "isrl/unbalanced": [
        (
            ".",
            "depend on averages of the parameters across silos, rather than maximums",
            "Remark H.1, if the variance of 1/M_r is small",
        ),
    ],
    "isrl/smoothing": [
        (".", "via Nesterov smoothing", "appendix D.2, Lemma D.7"),
    ],
    "isrl/vector-protocol": [
        ("one pass|heterogeneity", "variation of One-Pass Accelerated Noisy MB-SGD", "Theorem 5.2"),
        (".", "there are choices of parameters", "appendix G, Lemma G.1"),
    ],
    # ---- Choquette-Choo et al. 2023 ----
    "correlated/language-model": [(".", "", "section 5")],
    "correlated/digits": [(".", "", "section 5")],
}


def quoted(figure: str, claim: str) -> dict[str, str]:
    """The paper's words for a claim and where they stand; empty if none are on record."""
    for pattern, words, where in QUOTES.get(figure, ()):
        if re.search(pattern, claim):
            return {"quote": words, "where": where}
    return {}
