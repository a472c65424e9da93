"""The store (layer 3): SQL behind verbs. Policy is enforced here, for every door."""
