"""What tests need and users of the package may want for theirs: rank pools, fault points."""
