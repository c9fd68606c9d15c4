"""Database: connections, tables, migrations and what is kept of it for a moment."""
