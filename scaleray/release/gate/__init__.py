"""`scaleray gate`: evaluate the evidence from recorded runs, certificates and studies against a policy."""
