"""A fleet on paper: replicas simulated event by event, with the engine, the controller and the router that serve."""
