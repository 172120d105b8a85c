"""torch lives here: stage model, KV cache, weights, and the boundary that stays with the user."""
