"""The part of the API that runs jobs: it stands on no other."""
