"""People and service accounts: whose tokens and jobs there are."""
