"""Words of a command line: what --help says of them, what a wrong one meant, and models as people name them."""
