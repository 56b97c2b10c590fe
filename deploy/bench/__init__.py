"""``pdserve bench``: the product's promises, each measured against a reference in the same run.

Every value is the median of at least three runs. Within a run ours and the reference take turns,
so that what else happens on the machine meets both; a ratio is the median of the runs' ratios.

What the words mean, on the client's clock unless said otherwise: *time to the first token* is from
the call to the first message with a token; an *inter-token gap* is between two messages of one
stream that carry tokens (a message with several tokens ends one gap), and gaps are pooled over all
streams before a percentile is taken. Percentiles interpolate between the two nearest values.
"""
