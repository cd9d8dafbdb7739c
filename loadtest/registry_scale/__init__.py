"""One Redis under a fleet of ten to a thousand replicas: what it is asked, what that costs, where it ends."""
