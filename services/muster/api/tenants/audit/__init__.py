"""The audit: who did what, from where, before and after. Lines are only ever added."""
