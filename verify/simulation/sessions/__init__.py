"""A fleet on virtual time. Its engines, connections and processes all follow from one seed."""
