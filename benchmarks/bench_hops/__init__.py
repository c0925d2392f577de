"""What the fleet's hops cost beside other proxies."""
