"""What stages keep of microbatches between forward and backward: saved, counted, moved to the pair stage, brought
back.
"""
