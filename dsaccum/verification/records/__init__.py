"""What a verification leaves: the record, and how evidence is written into it."""
