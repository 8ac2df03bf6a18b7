"""Token dispatch: from tokens to the slots of their experts, and results back to tokens."""
