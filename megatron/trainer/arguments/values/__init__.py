"""What several flags say together: ranges, batch sizes, the layout of layers, the vocabulary."""
