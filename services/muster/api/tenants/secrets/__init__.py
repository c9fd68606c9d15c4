"""Secrets: named objects of a project, whose values nobody is shown."""
