"""Command line of moesaic: one module per verb. A verb imports torch only when it runs."""
