"""Pipeline programs: instructions, schedules, passes, proofs, simulation and drawing without torch; `runtime` executes them."""
