"""`calibrate`, and what it needs: held-out data, read and divided into folds, and the search for T, T_c and c."""
