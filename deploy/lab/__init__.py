"""The policy lab: one workload through several configurations of the same engine, compared.

workload       what is asked and when (pure)
ready          the workloads that come along, each with its configurations
configurations deploy files derived from one base, at equal cores
link           a slower link between workers, by the fault seam
play           drives a running cluster through its doors, and notes when each token came
measures       from notes to figures (pure)
results        the figures as a table and as JSON
plots, page    pictures and a page of its own, without scripts or a network
runner         ``pdserve lab``
"""
