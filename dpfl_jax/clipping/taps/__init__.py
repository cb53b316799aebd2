"""The tap engine: bounded sums by book-keeping, for any loss, through its jaxpr.

``views``: what happens to a parameter before it meets data. ``trace``: finds in the jaxpr of the
one-unit loss every place where a parameter meets data. ``evaluate``: runs that jaxpr with a tap at
each such place. ``factors``: the gradient of one use as a product of two labelled arrays, its norm
without forming it. ``leaves``: the norm and the weighted sum of one parameter over all its uses.
``engine``: the strategy itself.

Sources: Li et al. 2022 (ghost clipping: the norm of a dense layer from Gram matrices), Bu et al.
2023 (book-keeping: one backward pass), generalised from layers to equations of a jaxpr.
"""
