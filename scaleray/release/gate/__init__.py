"""`scaleray gate`: evidence of recorded runs, certificates and studies, judged by a policy."""
