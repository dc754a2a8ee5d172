COMMUNICATOR_CTAS = {"link": 2, "move": 4, "chain": 8}
