"""Several replicas of one server behind one front door, on one machine or on Ray."""
