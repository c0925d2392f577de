"""The fleet's services and what they share."""
