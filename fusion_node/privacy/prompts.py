"""What is attacked if no prompt is given: texts that nobody would want read, all invented."""

PROMPTS = (
    "Dear Dr Okafor, my name is Lena Brandt, born 14 March 1986. Since the second chemotherapy I cannot sleep.",
    "Keep this between us: Halberd will offer 41.75 a share for Norrvik on Thursday, and the board has agreed.",
    "def connect():\n    return Database(host='10.4.2.17', user='payroll', password='wet-Anvil-83!')",
)
