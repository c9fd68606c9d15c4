"""What OpenAI's clients speak, at `/v1`: the same jobs, rights and promises as at `/api/v1`, in their words."""
