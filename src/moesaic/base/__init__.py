"""What everything else stands on: configuration, errors, events, records, tensor files. No torch."""
