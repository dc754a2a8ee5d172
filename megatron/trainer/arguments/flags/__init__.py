"""The flags as data, and the parser that is made from them."""
