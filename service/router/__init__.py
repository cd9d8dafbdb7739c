"""`quire route`: one address for several replicas; requests go where their prefix is cached."""
