"""What moesaic costs, measured: README.md has the protocol, results/ the figures."""
