"""Pipeline programs: their words, rows and text form, and the rules that all consumers share. Without torch."""
