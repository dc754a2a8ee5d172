"""A program: its words, its rows, its text, and the rules of what they mean. Without torch."""
