"""The flags, as data, and the parser that is made of them."""
