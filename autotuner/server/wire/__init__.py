"""Bodies and queries that service and client share, as Pydantic models. Times of day are in UTC."""
