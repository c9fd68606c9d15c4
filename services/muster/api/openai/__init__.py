"""OpenAI-compatible API at `/v1`: the same jobs, permissions and guarantees as at `/api/v1`, in OpenAI's terms."""
