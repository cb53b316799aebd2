"""Records with their own budgets (rPDP-FL, Liu et al. 2024): budgets, baselines, what each spent.

``budgets`` are the distributions of the paper and budgets from a column, ``policies`` turn budgets
into sampling rates (the certified one, the paper's, the baselines), ``records`` is the table of
what every record asked for and spent, ``personalise`` joins them with a federation. The
mechanism itself is ``federation.mechanisms.rpdp``.
"""
