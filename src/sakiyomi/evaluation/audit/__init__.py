"""The audit: whether generated text is the target's own, token by token when greedy, by distribution when sampled."""
