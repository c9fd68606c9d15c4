"""The pure core: frozen observations in, one Decision out."""
