from .._release import missing

Sequential, FusibleOperation = missing("Sequential", "FusibleOperation")
