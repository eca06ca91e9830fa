"""Other systems' names and exact semantics over Muster's collecting; one module for each system."""
