"""What holds when several replicas serve behind one front door: equal texts, nothing lost, prefixes that stay, fairness."""
