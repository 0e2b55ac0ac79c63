"""How the logits depend on the parameters: Jacobians, layer by layer or as terms V ⊗ hᵀ."""
