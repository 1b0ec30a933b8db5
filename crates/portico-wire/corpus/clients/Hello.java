// java Hello.java PORT NAME: one TLS connection to a loopback port, asking for the name.

import java.util.List;
import javax.net.ssl.SNIHostName;
import javax.net.ssl.SSLSocket;
import javax.net.ssl.SSLSocketFactory;

public class Hello {
    public static void main(String[] arguments) throws Exception {
        int port = Integer.parseInt(arguments[0]);
        try (var socket = (SSLSocket) SSLSocketFactory.getDefault().createSocket("127.0.0.1", port)) {
            var parameters = socket.getSSLParameters();
            parameters.setServerNames(List.of(new SNIHostName(arguments[1])));
            parameters.setApplicationProtocols(new String[] {"h2", "http/1.1"});
            socket.setSSLParameters(parameters);
            socket.startHandshake();
        }
    }
}
