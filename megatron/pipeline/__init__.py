"""Pipeline programs: built, proved, simulated and drawn without torch; `runtime` executes them."""
