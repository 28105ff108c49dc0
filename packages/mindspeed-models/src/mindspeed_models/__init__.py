"""Model families and their weight rules in both directions, chat text, the catalog and the planner."""
