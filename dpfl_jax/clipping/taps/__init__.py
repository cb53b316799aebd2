"""The tap engine: clipped sums by book-keeping, for any loss, through its jaxpr.

``views``: operations on a parameter before it meets data. ``trace``: finds every equation (site) in
the jaxpr of the one-unit loss in which a parameter meets data. ``evaluate``: runs that jaxpr with a
tap at each site. ``factors``: the gradient of one use of a parameter as a product of two labelled
arrays. ``leaves``: the norm and the weighted sum of one parameter over all its uses. ``engine``:
the strategy itself. The derivation is in docs/internals/clipping.md.

Sources: Li et al. 2022 (ghost clipping: the norm of a dense layer from Gram matrices), Bu et al.
2023 (book-keeping: one backward pass), generalised from layers to equations of a jaxpr.
"""
