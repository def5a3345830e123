"""What every room of the toolkit may use, and which knows none of them."""
