"""The command line: one file a verb. A verb imports its engine, and with it torch, when it runs."""
