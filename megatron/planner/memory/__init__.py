"""How much memory ranks and hosts need, and what for."""
