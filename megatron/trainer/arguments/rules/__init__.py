"""Rules about which values fit together, one file per subject; the package above defines their order."""
