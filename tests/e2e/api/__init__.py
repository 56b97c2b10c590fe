"""Cases of the API over the whole path: real doors, real workers, each shape and each way."""
